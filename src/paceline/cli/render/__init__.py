"""Terminal tables, HTML pages and colours that the commands print."""
