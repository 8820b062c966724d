"""Text in and out: tokenizer, chat template, incremental detokenisation, stop strings; no torch."""

from quadriga.text.answer import AnswerText
from quadriga.text.detokenizer import Detokenizer
from quadriga.text.stops import StopMatcher
from quadriga.text.tokenizer import TextTokenizer, load_tokenizer

__all__ = ["AnswerText", "Detokenizer", "StopMatcher", "TextTokenizer", "load_tokenizer"]
