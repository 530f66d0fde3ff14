"""Workers on Spark's executors."""
