"""The configuration: its sections, how it is read, and how `auto` is resolved."""
