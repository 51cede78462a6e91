"""Other people's programs: recording their steps (`inspect`) and trying changes (`advise`)."""
