from sie_cli.entry import main

main()
