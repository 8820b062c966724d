"""The SDK over TLS, with a CA of your own and, where the server asks for one, a client certificate.

python examples/sdk_tls.py ca.crt [client.crt client.key]
"""

import os
import sys
from pathlib import Path

from quadriga.client import Client

ca, *identity = [Path(name).read_bytes() for name in sys.argv[1:]]
certificate, key = identity or (None, None)

with Client(
    os.environ.get("QUADRIGA_GRPC", "localhost:9443"),
    api_key=os.environ["QUADRIGA_API_KEY"],
    root_certificates=ca,
    client_certificate=certificate,
    client_key=key,
) as client:
    print(client.generate("Sort: 7 3 9 1\n", max_tokens=32, temperature=0).text)
