"""What the actors export to Prometheus, traces, and the page that serves it."""
