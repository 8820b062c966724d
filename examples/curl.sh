#!/bin/sh
# Plain curl: health, models, an answer, a stream.
set -eu
URL="${QUADRIGA_URL:-http://127.0.0.1:8000}"
KEY="authorization: Bearer ${QUADRIGA_API_KEY:-none}"
TYPE="content-type: application/json"

curl -sS --fail-with-body "$URL/health"
echo
curl -sS --fail-with-body -H "$KEY" "$URL/v1/models"
echo
curl -sS --fail-with-body -H "$KEY" -H "$TYPE" "$URL/v1/chat/completions" \
  -d '{"messages": [{"role": "user", "content": "Sort: 7 3 9 1"}], "max_tokens": 32, "temperature": 0}'
echo
curl -sSN --fail-with-body -H "$KEY" -H "$TYPE" "$URL/v1/completions" \
  -d '{"prompt": "Count from 3 to 9.\n", "max_tokens": 32, "temperature": 0, "stream": true}'
