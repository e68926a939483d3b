"""terminal.py WHEN COMMAND...: runs COMMAND with a terminal as standard error, and interrupts it at WHEN. WHEN is a
number of seconds (0: never), or a pattern: interrupts once two lines with it were seen. Prints the exit code, how often
a line was written, and whether the last thing written erased the line."""
import os, pty, re, select, signal, subprocess, sys, threading

master, slave = pty.openpty()
run = subprocess.Popen(sys.argv[2:], stdout=open("said", "w"), stderr=slave, # where SIGINT is ignored, as in the background
                       preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
when = sys.argv[1]
seconds = float(when) if when.isdigit() else 600 # for one that hangs
timer = threading.Timer(seconds, run.send_signal, [signal.SIGINT])
if seconds > 0:
    timer.start()
seen = b""
while True: # the slave stays open here: once all are closed, what has not been read yet may be lost
    ended = run.poll() is not None
    if not select.select([master], [], [], 0 if ended else 0.05)[0]:
        if ended:
            break
        continue
    seen += os.read(master, 4096)
    if not when.isdigit() and len(re.findall(when.encode(), seen)) >= 2:
        run.send_signal(signal.SIGINT)
timer.cancel()
open("seen", "wb").write(seen)
lines = [line for line in seen.split(b"\r") if b" s" in line]
print(run.wait(), "lines" if len(lines) > 1 else len(lines), "erased" if seen.endswith(b"\r\x1b[K") else "left")
