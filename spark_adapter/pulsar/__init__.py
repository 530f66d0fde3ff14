"""format("pulsar"): the options of the JVM connector, translated to those of keyshard."""
