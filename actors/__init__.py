"""The Ray actors: lifecycle, calls and wiring around the loops and policies of `quadriga`."""
