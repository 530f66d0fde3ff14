"""What people see of a source: status, commands that find it, metrics, the doctor."""
