"""What operators use: the admin API and the ingress' metrics."""
