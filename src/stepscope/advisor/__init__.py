"""User programs: record their training steps (`inspect`) and try changes on them (`advise`)."""
