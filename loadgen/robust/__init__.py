"""Long and hard runs against a service: soak, overload, and upgrades under load."""
