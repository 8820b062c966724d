#!/bin/sh
# Plain curl: health, models, an answer, a stream. Arguments are the question.
set -eu
URL="${QUADRIGA_URL:-http://127.0.0.1:8000}"
KEY="authorization: Bearer ${QUADRIGA_API_KEY:-none}"
TYPE="content-type: application/json"
QUESTION=$(printf %s "${*:-What is the capital of France?}" | sed 's/[\\"]/\\&/g')
BODY="\"messages\": [{\"role\": \"user\", \"content\": \"$QUESTION\"}], \"max_tokens\": 64"

curl -sS --fail-with-body "$URL/health"
echo
curl -sS --fail-with-body -H "$KEY" "$URL/v1/models"
echo
curl -sS --fail-with-body -H "$KEY" -H "$TYPE" "$URL/v1/chat/completions" \
  -d "{$BODY}"
echo
curl -sSN --fail-with-body -H "$KEY" -H "$TYPE" "$URL/v1/chat/completions" \
  -d "{$BODY, \"stream\": true}"
