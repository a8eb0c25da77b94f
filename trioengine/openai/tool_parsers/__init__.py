"""How models write tool calls, by name: each way has a parser, and a form that makes a model write it."""
