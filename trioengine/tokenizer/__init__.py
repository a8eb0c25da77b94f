"""Text to token ids and back: tokenizer, chat template, incremental detokenizer, stop strings.

Everything here is synchronous and does no input or output after loading; `Tokenizer` may be used from several threads.
This package does not know requests or models, and never loads torch.
"""
