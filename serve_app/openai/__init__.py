"""The OpenAI API: schemas, validation, rendering of answers, the OpenAPI page."""
