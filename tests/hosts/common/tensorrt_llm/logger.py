import logging

logger = logging.getLogger("tensorrt_llm")
