"""How the service gets onto machines; not part of what is installed."""
