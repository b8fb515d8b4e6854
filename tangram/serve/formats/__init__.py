"""The forms in which models write thoughts and tool calls, read and as grammars."""
