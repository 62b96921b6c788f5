"""One module per `cldetr` subcommand."""
