"""The controller actor: which replicas run where, HELIOS, scaling, drain."""
