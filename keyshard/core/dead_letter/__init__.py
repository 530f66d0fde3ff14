"""What a dead letter says, and which keys are parked behind one."""
