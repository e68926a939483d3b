// engine.js - the command in a worker. It runs as a WebAssembly program that sees its arguments, files in memory, standard
// output and a clock, which is what WASI calls a command. Every run is a new instance, so nothing is left of the last one.
"use strict";

const ERRNO = {none: 0, badFile: 8, noEntry: 44, noSystem: 52, notPermitted: 63};
const KINDS = {directory: 3, file: 4};
const ROOT = 3; // the folder that all names are in

class Exit extends Error {
  constructor(code) {
    super("exit");
    this.code = code;
  }
}

// The imports of a program, for its arguments and files ({name: text}). open: descriptors, each {bytes, at} or {pieces}.
function systemOf(args, files, memory) {
  const view = () => new DataView(memory().buffer), bytes = () => new Uint8Array(memory().buffer);
  const encoder = new TextEncoder(), decoder = new TextDecoder();
  const open = [{bytes: new Uint8Array(0), at: 0}, {pieces: []}, {pieces: []}, {}];
  const words = args.map(arg => encoder.encode(arg + "\0")), kindOf = fd => fd === ROOT ? KINDS.directory : KINDS.file;
  const fileAt = (at, n) => {
    const name = decoder.decode(bytes().slice(at, at + n)).replace(/^\.?\//, "");
    if (!Object.hasOwn(files, name)) return null;
    return typeof files[name] === "string" ? encoder.encode(files[name]) : files[name];
  };
  const putStat = (at, kind, size) => {
    bytes().fill(0, at, at + 64);
    view().setUint8(at + 16, kind);
    view().setBigUint64(at + 24, 1n, true);
    view().setBigUint64(at + 32, BigInt(size), true);
    return ERRNO.none;
  };
  const eachPart = (at, n, take) => {
    let sum = 0;
    for (let i = 0; i < n; i++) {
      const start = view().getUint32(at + 8 * i, true), size = view().getUint32(at + 8 * i + 4, true);
      sum += take(start, size);
    }
    return sum;
  };
  const calls = {
    args_sizes_get(n, size) {
      view().setUint32(n, words.length, true);
      view().setUint32(size, words.reduce((sum, word) => sum + word.length, 0), true);
    },
    args_get(list, at) {
      words.forEach((word, i) => {
        view().setUint32(list + 4 * i, at, true);
        bytes().set(word, at);
        at += word.length;
      });
    },
    environ_sizes_get(n, size) {
      view().setUint32(n, 0, true);
      view().setUint32(size, 0, true);
    },
    environ_get() {},
    clock_time_get(_clock, _precision, at) {
      view().setBigUint64(at, BigInt(Math.round(performance.now() * 1e6)), true);
    },
    fd_prestat_get(fd, at) {
      if (fd !== ROOT) return ERRNO.badFile;
      view().setUint32(at, 0, true);
      view().setUint32(at + 4, 1, true);
    },
    fd_prestat_dir_name(_fd, at) { bytes()[at] = 46; }, // "."
    fd_fdstat_get(fd, at) {
      if (!open[fd]) return ERRNO.badFile;
      bytes().fill(0, at, at + 24);
      view().setUint8(at, kindOf(fd));
      view().setBigUint64(at + 8, 0x1fffffffn, true);
      view().setBigUint64(at + 16, 0x1fffffffn, true);
    },
    fd_fdstat_set_flags() {},
    fd_filestat_get(fd, at) {
      return open[fd] ? putStat(at, kindOf(fd), open[fd].bytes ? open[fd].bytes.length : 0) : ERRNO.badFile;
    },
    path_filestat_get(_fd, _flags, name, n, at) {
      const found = fileAt(name, n);
      return found ? putStat(at, KINDS.file, found.length) : ERRNO.noEntry;
    },
    path_open(_fd, _look, name, n, flags, _rights, _inherited, _mode, at) {
      const found = fileAt(name, n);
      if (!found) return flags & 1 ? ERRNO.notPermitted : ERRNO.noEntry;
      view().setUint32(at, open.push({bytes: found, at: 0}) - 1, true);
    },
    fd_read(fd, parts, n, done) {
      const file = open[fd];
      if (!file || !file.bytes) return ERRNO.badFile;
      view().setUint32(done, eachPart(parts, n, (start, size) => {
        const piece = file.bytes.subarray(file.at, file.at + size);
        bytes().set(piece, start);
        file.at += piece.length;
        return piece.length;
      }), true);
    },
    fd_write(fd, parts, n, done) {
      const file = open[fd];
      if (!file || !file.pieces) return ERRNO.badFile;
      view().setUint32(done, eachPart(parts, n, (start, size) => {
        file.pieces.push(bytes().slice(start, start + size));
        return size;
      }), true);
    },
    fd_seek(fd, by, from, at) {
      const file = open[fd];
      if (!file || !file.bytes) return ERRNO.badFile;
      file.at = Number(by) + [0, file.at, file.bytes.length][from];
      view().setBigUint64(at, BigInt(file.at), true);
    },
    fd_close(fd) {
      if (!open[fd]) return ERRNO.badFile;
      if (fd > ROOT) open[fd] = null;
    },
    fd_sync() {},
    proc_exit(code) { throw new Exit(code); }
  };
  for (const name of ["fd_filestat_set_size", "fd_readdir", "path_rename", "path_unlink_file"])
    calls[name] = () => ERRNO.noSystem;
  for (const [name, call] of Object.entries(calls)) calls[name] = (...given) => call(...given) || ERRNO.none;
  const textOf = fd => {
    const size = open[fd].pieces.reduce((sum, piece) => sum + piece.length, 0), whole = new Uint8Array(size);
    open[fd].pieces.reduce((at, piece) => (whole.set(piece, at), at + piece.length), 0);
    return decoder.decode(whole);
  };
  return {calls, textOf};
}

// Runs a program. If it stops without an exit code, memory was short, because the command has no other such end.
function runProgram(module, args, files) {
  let instance = null, code = 0, why = "";
  const system = systemOf(["chunkflow", ...args], files, () => instance.exports.memory);
  try {
    instance = new WebAssembly.Instance(module, {wasi_snapshot_preview1: system.calls});
    instance.exports._start();
  } catch (error) {
    code = error instanceof Exit ? error.code : 1;
    if (!(error instanceof Exit)) why = `chunkflow: this page has too little memory for it (${error.message})\n`;
  }
  return {code, out: system.textOf(1), said: system.textOf(2) + why};
}

let program;
onmessage = ({data: {module, id, args, files}}) => {
  if (module) program = module;
  if (!args) return;
  const begun = performance.now(), answer = runProgram(program, args, files);
  postMessage({id, ...answer, seconds: (performance.now() - begun) / 1000});
};
