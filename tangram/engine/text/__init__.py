"""Text to tokens and back: chat templates, answers, grammars that answers must follow."""
