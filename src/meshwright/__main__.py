from meshwright.cli import main

main()
