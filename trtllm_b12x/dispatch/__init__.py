# SPDX-License-Identifier: Apache-2.0
"""Choose which kernel serves how many tokens, by measurements on the card or by a fixed threshold."""
