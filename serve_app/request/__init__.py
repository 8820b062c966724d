"""One request inside the ingress: from its submission to its last token."""
