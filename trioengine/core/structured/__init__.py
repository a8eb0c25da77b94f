"""What a form of an answer becomes before tokens are known: checked JSON schemas, grammars, and their compilation.

`core.structured_output` is the door; nothing else imports this package.
"""
