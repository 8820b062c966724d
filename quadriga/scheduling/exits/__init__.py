"""What a decode loop does at exits: tokens leave, wait, or are drafted there."""
