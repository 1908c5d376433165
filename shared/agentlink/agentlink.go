// Package agentlink is the contract between hostd and the agent inside a
// machine, and the list of paths the agent serves over the session link.
//
// Every connection to the agent begins with one byte that hostd writes:
//
//	'C'  control: plain HTTP/1.1 with hostd itself, the Control* paths below
//	'L'  link: a transport of the session link (shared/link); over its streams
//	     the agent serves plain HTTP/1.1 with the Path* paths below
//
// The agent's listening socket is made by hostd outside the machine and
// inherited as file descriptor 3, so nothing inside the machine can reach,
// replace or answer for it.
package agentlink

import (
	"encoding/json"
	"time"

	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/session"
)

// First byte of every connection to the agent.
const (
	PrefaceControl byte = 'C'
	PrefaceLink    byte = 'L'
)

// ListenFD is the inherited descriptor of the agent's listening socket.
const ListenFD = 3

// Control paths, JSON in and out, errors as the apierr envelope.
const (
	ControlState  = "/control/state"  // GET → State; with ?wait=1 it answers once Ready or Failed
	ControlStart  = "/control/start"  // POST Start → 204; once in a machine's life, again is a no-op for the same SessionID
	ControlFreeze = "/control/freeze" // POST Freeze → 204: customer processes stand still; idempotent
	ControlClock  = "/control/clock"  // GET → Clock
	ControlThaw   = "/control/thaw"   // POST Thaw → 204: clock, entropy, identity are mended, then customer processes go on; idempotent
	ControlWhole  = "/control/whole"  // POST {} → 204 once all is there that a Fresh thaw leaves for later: a page, a bash
	ControlExport = "/control/export" // GET → the session's portable state as one stream; the machine must be frozen
	ControlImport = "/control/import" // POST that stream → 204; once, on a machine that was started with Held
	ControlProxy  = "/control/proxy"  // POST Proxy → 204: for shells, terminals and commands started from now on; idempotent
	ControlEvents = "/control/events" // GET ?after=N → endless NDJSON of Notice with N greater than after
)

// Paths over the session link. Bodies, queries and answers are those of the
// public API, errors included: the gateway passes them on untouched.
const (
	PathExec         = "/exec"          // POST, body of POST /v1/sessions/:id/exec
	PathShellRestart = "/shell/restart" // POST {shell?} → 204
	PathFiles        = "/files"         // GET (list=1, stat=1, Range), PUT, DELETE ?path=
	PathFilesWait    = "/files/wait"    // GET ?pattern=&timeoutMs=
	PathFilesMkdir   = "/files/mkdir"   // POST {path}
	PathFilesMove    = "/files/move"    // POST {from, to}
	PathTerminal     = "/terminal"      // WebSocket
	PathCDP          = "/cdp"           // WebSocket: one CDP client; ?viewer=1 for the live view, which is not counted
	PathJSONVersion  = "/json/version"  // GET: Chrome's, webSocketDebuggerUrl set to the header ConnectURLHeader
	PathJSONList     = "/json/list"     // GET: Chrome's list, each webSocketDebuggerUrl likewise
)

// ConnectURLHeader carries, from gateway to agent, the connectUrl that
// /json/version and /json/list answer with.
const ConnectURLHeader = "X-Berth-Connect-Url"

// PlatformClose is the WebSocket close code with which the gateway tells the
// agent that the platform, not the client, ended a CDP or terminal socket: the
// client then has GraceAfterPlatformClose to come back before the agent counts
// it as gone. It never reaches a client.
const PlatformClose = 4990

// GraceAfterPlatformClose is how long a client that the platform cut stays
// counted (decisions "Lifetime").
const GraceAfterPlatformClose = 60 * time.Second

// State answers ControlState.
type State struct {
	// Ready: everything that the machine's kind has is up (Chrome answered CDP,
	// a bash waits). A pool machine is ready before it is taken.
	Ready bool `json:"ready"`
	// Failed is a sentence when the machine can never become ready.
	Failed string `json:"failed,omitempty"`
	// Note is a sentence about a weakness of this machine that the operator
	// should know, such as a Chrome without its own sandbox.
	Note string `json:"note,omitempty"`
	// SessionID is set by Start.
	SessionID string `json:"sessionId,omitempty"`
	// Clients counts CDP clients, those in grace included.
	Clients int `json:"clients"`
	// HadClients says that a CDP client has been counted at some time.
	HadClients bool `json:"hadClients"`
	// LastNotice is the number of the newest Notice, 0 before the first.
	LastNotice uint64 `json:"lastNotice"`
}

// Start gives a waiting machine to a session.
type Start struct {
	SessionID string            `json:"sessionId"`
	Kind      session.Kind      `json:"kind"`
	Viewport  session.Viewport  `json:"viewport"`
	Env       map[string]string `json:"env,omitempty"`   // for shells and terminals
	Setup     []string          `json:"setup,omitempty"` // run in order in the default shell
	// Held: the customer gets nothing to run before a Thaw; an Import comes first.
	Held bool `json:"held,omitempty"`
	// Proxy: the shell is told of the session's egress listener from the start.
	Proxy Proxy `json:"proxy"`
}

// Proxy says whether programs of the shell are told of the egress listener by
// their environment (ProxyVars).
type Proxy struct {
	Shell bool `json:"shell,omitempty"`
	// Version is that of the session's settings: an order older than one that was
	// obeyed is ignored, since orders may arrive late.
	Version uint64 `json:"version,omitempty"`
}

// Freeze stops the customer's processes before a capture. Portable leaves Chrome
// alive, since the export asks it for tabs, cookies and storage.
type Freeze struct {
	Portable bool `json:"portable,omitempty"`
	// Template: a machine that has no session is made fit to be cloned, which may
	// take a minute. It has no page, renderer or bash then; a Fresh thaw is next.
	Template bool `json:"template,omitempty"`
}

// Clock is a machine's clock that nobody sets (CLOCK_MONOTONIC), nanoseconds.
type Clock struct {
	Monotonic int64 `json:"monotonic"`
}

// Thaw lets a machine go on, after a restore, a start from a template, or a
// capture whose operation was aborted.
type Thaw struct {
	Now     time.Time `json:"now"`            // the host's clock; the machine's is set to it
	AsOf    int64     `json:"asOf,omitempty"` // Clock.Monotonic when Now was true; 0: when the order came
	Entropy []byte    `json:"entropy"`        // at least 64 random bytes for the guest kernel's pool, credited
	// Fresh: the memory was cloned from a template, so all that must be unique is
	// made anew: machine-id, host keys, boot id where possible, seeds of running
	// processes (Chrome's are wiped), the lineage of session links. Chrome's page
	// and a bash come when they are needed, or a little later: see ControlWhole. False: the memory is the one continuation of its capture.
	Fresh bool `json:"fresh,omitempty"`
	// Proxy is in force before the customer's processes go on; nil changes nothing.
	Proxy *Proxy `json:"proxy,omitempty"`
}

// Notice is one thing the agent tells hostd. N rises by one from 1 for the
// life of the machine; the agent keeps the newest 4096 and hostd asks again
// from the last it stored, so each is seen once whatever breaks.
type Notice struct {
	N       uint64       `json:"n"`
	Event   *event.Event `json:"event,omitempty"`   // to append to the log; Seq is hostd's to set
	Clients *int         `json:"clients,omitempty"` // CDP clients now
	Setup   *Setup       `json:"setup,omitempty"`
}

// Setup is the progress of setup.
type Setup struct {
	Status session.SetupStatus `json:"status"`
	Error  string              `json:"error,omitempty"`
}

// ExecRequest is the body of exec (spec "Shell").
type ExecRequest struct {
	Command   string            `json:"command"`
	TimeoutMs int               `json:"timeoutMs,omitempty"` // 0: 120000; at most 3600000
	Cwd       string            `json:"cwd,omitempty"`
	Env       map[string]string `json:"env,omitempty"`
	Shell     json.RawMessage   `json:"shell,omitempty"` // a name, or false; absent: "default"
	Stream    bool              `json:"stream,omitempty"`
}

// ExecResult answers exec without stream. ExitCode is null when the timeout
// stopped the command.
type ExecResult struct {
	Stdout     string `json:"stdout"`
	Stderr     string `json:"stderr"`
	ExitCode   *int   `json:"exitCode"`
	TimedOut   bool   `json:"timedOut"`
	Truncated  bool   `json:"truncated"`
	DurationMs int64  `json:"durationMs"`
}
