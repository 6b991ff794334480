// One walk through a sandbox's life with the npm package `e2b`; run by tests/vm/test_sdk_versions.py, which copies this
// file beside the installed package. The server comes from E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY. Ends with one
// line of JSON on standard output: the steps that were walked.

import assert from 'node:assert/strict'
import { CommandExitError, NotFoundError, Sandbox, TimeoutError } from 'e2b'

const CYCLES = 10
const TIMEOUT_MS = 120_000

async function commands(box) {
  const done = await box.commands.run('echo $GREETING; echo err >&2; pwd; id -un')
  assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['hello\n/home/user\nuser\n', 'err\n', 0])
  await assert.rejects(box.commands.run('echo partial; exit 7'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.deepEqual([error.exitCode, error.stdout], [7, 'partial\n'])
    return true
  })
  await assert.rejects(box.commands.run('sleep 60', { timeoutMs: 1000 }), TimeoutError)
}

async function stdinAndBackground(box) {
  const cat = await box.commands.run('cat; echo closed', { background: true, stdin: true })
  await box.commands.sendStdin(cat.pid, 'through stdin\n')
  assert.ok((await box.commands.list()).some((process) => process.pid === cat.pid))
  await box.commands.closeStdin(cat.pid)
  assert.equal((await cat.wait()).stdout, 'through stdin\nclosed\n')
  const sleeper = await box.commands.run('sleep 1000', { background: true })
  assert.equal(await box.commands.kill(sleeper.pid), true)
  assert.equal(await box.commands.kill(sleeper.pid), false)
  await assert.rejects(sleeper.wait())
}

async function terminal(box) {
  let seen = ''
  const decoder = new TextDecoder()
  const onData = (data) => { seen += decoder.decode(data, { stream: true }) }
  const shell = await box.pty.create({ cols: 80, rows: 24, onData, timeoutMs: 60_000 })
  await box.pty.resize(shell.pid, { cols: 132, rows: 50 })
  await box.pty.sendInput(shell.pid, new TextEncoder().encode('stty size; exit 3\n'))
  await assert.rejects(shell.wait(), (error) => error.exitCode === 3)
  assert.match(seen, /50 132/)
}

async function files(box) {
  const binary = new Uint8Array(256 * 1024).map((_, index) => index % 256)
  await box.files.write('deep/er/data.bin', binary.buffer)
  assert.deepEqual(new Uint8Array(await box.files.read('/home/user/deep/er/data.bin', { format: 'bytes' })), binary)
  const written = await box.files.write([{ path: 'a.txt', data: 'first' }, { path: 'leer ü', data: '' }])
  assert.deepEqual(written.map((entry) => entry.path), ['/home/user/a.txt', '/home/user/leer ü'])
  assert.equal(await box.files.read('leer ü'), '')
  const names = (await box.files.list('/home/user')).map((entry) => entry.name)
  for (const name of ['a.txt', 'leer ü', 'deep']) assert.ok(names.includes(name), name)
  assert.equal((await box.files.getInfo('a.txt')).size, 5)
  await box.files.rename('/home/user/a.txt', '/home/user/b.txt')
  assert.deepEqual([await box.files.exists('b.txt'), await box.files.exists('a.txt')], [true, false])
  assert.deepEqual([await box.files.makeDir('dir'), await box.files.makeDir('dir')], [true, false])
  await box.files.remove('dir')
  await assert.rejects(box.files.read('a.txt'), NotFoundError)
}

async function tenCycles(box) {
  const loop = 'i=0; while :; do i=$((i+1)); echo $i > /dev/shm/tick; sleep 0.1; done'
  const ticker = await box.commands.run(loop, { background: true, timeoutMs: 0 })
  // The stream breaks at the first pause; the process does not.
  ticker.wait().catch(() => {})
  let wanted = ''
  for (let cycle = 0; cycle < CYCLES; cycle++) {
    await box.files.write(`/home/user/cycle${cycle}`, `data of ${cycle}`)
    wanted += `data of ${cycle}\n`
    assert.equal(await box.pause(), true)
    assert.equal(await box.isRunning(), false)
    box = cycle % 2 ? await Sandbox.connect(box.sandboxId, { timeoutMs: TIMEOUT_MS }) : await box.connect({ timeoutMs: TIMEOUT_MS })
    assert.equal((await box.commands.run('for f in $(ls -v cycle*); do cat $f; echo; done')).stdout, wanted)
  }
  const before = Number(await box.files.read('/dev/shm/tick'))
  await new Promise((resolve) => setTimeout(resolve, 1000))
  assert.ok(Number(await box.files.read('/dev/shm/tick')) > before)
  assert.equal(await box.commands.kill(ticker.pid), true)
}

async function snapshot(box) {
  await box.files.write('state', 'before')
  const made = await box.createSnapshot()
  await box.files.write('state', 'after')
  const other = await Sandbox.create(made.snapshotId, { timeoutMs: TIMEOUT_MS })
  assert.deepEqual([await other.files.read('state'), await box.files.read('state')], ['before', 'after'])
  assert.equal(await other.kill(), true)
  assert.ok((await Sandbox.listSnapshots().nextItems()).some((one) => one.snapshotId === made.snapshotId))
  assert.equal(await Sandbox.deleteSnapshot(made.snapshotId), true)
}

async function fork(box) {
  await box.files.write('state', 'shared')
  const children = await box.fork({ count: 2, timeoutMs: TIMEOUT_MS })
  assert.equal(new Set([box, ...children].map((one) => one.sandboxId)).size, 3)
  await children[0].files.write('state', 'mine')
  const states = await Promise.all([...children, box].map((one) => one.files.read('state')))
  assert.deepEqual(states, ['mine', 'shared', 'shared'])
  for (const child of children) assert.equal(await child.kill(), true)
}

async function listingAndEnd(box) {
  await box.setTimeout(90_000)
  const info = await box.getInfo()
  assert.deepEqual([info.metadata, info.state], [{ walk: 'js' }, 'running'])
  const found = []
  const listed = Sandbox.list()
  while (listed.hasNext) found.push(...(await listed.nextItems()).map((one) => one.sandboxId))
  assert.ok(found.includes(box.sandboxId))
  assert.equal(await box.kill(), true)
  assert.equal(await box.kill(), false)
  assert.equal(await box.isRunning(), false)
}

const options = { timeoutMs: TIMEOUT_MS, envs: { GREETING: 'hello' }, metadata: { walk: 'js' } }
const box = await Sandbox.create('base', options)
const walked = []
try {
  for (const step of [commands, stdinAndBackground, terminal, files, tenCycles, snapshot, fork, listingAndEnd]) {
    await step(box)
    walked.push(step.name)
  }
} catch (error) {
  console.error(`walked until ${walked}`)
  await box.kill()
  throw error
}
console.log(JSON.stringify({ steps: walked }))
// Streams that a pause broke may keep a connection's socket waiting; nothing is left to do.
process.exit(0)
