from trtllm_b12x.tools.cli import main

if __name__ == "__main__":
    main()
