"""OpenAI's Responses API: its bodies, events and objects, and the store of what was answered."""
