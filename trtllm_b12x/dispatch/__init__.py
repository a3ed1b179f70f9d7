"""Which kernel serves how many tokens: measured on the card, or a fixed threshold."""
