"""api *speaks*: OpenAI schemas, server-sent events, errors as HTTP; nothing else knows HTTP."""
