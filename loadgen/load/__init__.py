"""What is sent and when: traces, prompts, conversations, arrival times."""
