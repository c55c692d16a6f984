"""The sequence-coroutine engine: token ids in, token ids out.  Knows no text, files or Beam."""
