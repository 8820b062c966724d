"""Rules of the controller and the scheduler: which replicas run, and where requests go; pure."""
