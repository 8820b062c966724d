"""Queues, slots and step loops: what a replica does between forward passes. No torch, no Ray."""
