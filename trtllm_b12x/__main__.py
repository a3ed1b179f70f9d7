from trtllm_b12x.cli import main

if __name__ == "__main__":
    main()
