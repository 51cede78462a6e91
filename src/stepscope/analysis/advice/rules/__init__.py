"""The changes that are advised, one file each: the step with it and when it applies (`@rule`), what
to write (`Change.lines`), and how a trial makes it in a running program (`@setting`)."""
