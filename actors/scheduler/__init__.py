"""The central scheduler actor: admission, placement, rescheduling."""
