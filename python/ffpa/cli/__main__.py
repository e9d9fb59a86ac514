from ffpa.cli import main

main()
