"""What was published comes out of every way in, or its absence is named by a code and a count."""
