"""The routes of OpenAI's and vLLM's API, by subject. Each takes the application's `ServerContext` and answers."""
