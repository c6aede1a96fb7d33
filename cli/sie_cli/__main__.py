from sie_cli.main import main

main()
