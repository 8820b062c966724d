"""The code that ships, in one process and in virtual time, with faults chosen one by one."""
