"""HELIOS: choose model and depth from live profiles; load only the layers worth having.

messages           events, orders and status: the seam to the controller
candidates         step 1: at most three models of the catalogue; from configuration to a machine
profiling          step 2: live requests at full depth; the confidence breach counter
history            the performance history table and its file
exit_distribution  where tokens leave, what they cost, how many a partial depth changes
plans              what each model would do at each depth worth loading
selection          the best plan by objective, after a profile and after too many breaches
assignment         which replica shall hold what, and the one order that is under way
machine            the state machine

The controller makes one `Helios` (`candidates.start_helios`), calls `handle(event, now_s)` for
everything that happens, and carries out the `Resize` and `Switch` orders it returns, one at a time
by construction; it answers each with `OrderDone` or `OrderFailed`. The scheduler routes auto
requests by `routing`.
"""
