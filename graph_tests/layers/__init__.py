"""The layers of a proof: each looks at the callable in one way and says what it misses."""
