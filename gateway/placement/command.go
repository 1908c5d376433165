package placement

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
)

// commandVersion is that of the envelope. A gateway that meets a newer one in
// the log stops: skipping it would make its record differ from the others'.
const commandVersion = 1

// Command is one entry of the log.
type Command struct {
	V    int             `json:"v"`
	ID   string          `json:"id"` // 16 random bytes in hex; a retry carries the same
	At   int64           `json:"at"` // when it was proposed, Unix milliseconds; apply knows no other clock
	Kind kind            `json:"kind"`
	Data json.RawMessage `json:"data"`
}

type kind string

const (
	initCluster   kind = "init_cluster"
	createSession kind = "create_session"
	dropSession   kind = "drop_session"
	endSession    kind = "end_session"
	patchSession  kind = "patch_session"
	setSetup      kind = "set_setup"
	rotateURLs    kind = "rotate_urls"
	rotateProxy   kind = "rotate_proxy"
	putKey        kind = "put_key"
	revokeKey     kind = "revoke_key"
	setPlans      kind = "set_plans"

	machineEnded    kind = "machine_ended"
	openOperation   kind = "open_operation"
	commitOperation kind = "commit_operation"
	abortOperation  kind = "abort_operation"
	snapshotDurable kind = "snapshot_durable"

	recordUsage kind = "record_usage"
)

// The payloads.
type (
	initClusterData struct {
		SigningKey []byte `json:"signingKey"`
	}
	createSessionData struct {
		Session        session.Session `json:"session"`
		IdempotencyKey string          `json:"idempotencyKey,omitempty"`
	}
	dropSessionData struct {
		ID string `json:"id"`
	}
	rotateURLsData struct {
		ID         string `json:"id"`
		Disconnect bool   `json:"disconnect,omitempty"`
	}
	rotateProxyData struct {
		ID string `json:"id"`
	}
	endSessionData struct {
		ID     string            `json:"id"`
		Epoch  uint64            `json:"epoch"`
		At     time.Time         `json:"at"`
		Reason session.EndReason `json:"reason,omitempty"`
		Error  string            `json:"error,omitempty"`
	}
	patchSessionData struct {
		ID    string        `json:"id"`
		Patch session.Patch `json:"patch"`
	}
	setSetupData struct {
		ID     string              `json:"id"`
		Status session.SetupStatus `json:"status"`
		Error  string              `json:"error,omitempty"`
	}
	putKeyData struct {
		Project Project `json:"project"`
		Key     Key     `json:"key"`
	}
	revokeKeyData struct {
		ID string `json:"id"`
	}
	setPlansData struct {
		Plans []Plan `json:"plans"`
	}
	openOperationData struct {
		ID        string            `json:"id"`
		Operation session.Operation `json:"operation"`
		Key       []byte            `json:"key,omitempty"` // for a session that has none
	}
	commitOperationData struct {
		ID       string            `json:"id"`
		OpID     string            `json:"opId"`
		Snapshot *session.Snapshot `json:"snapshot,omitempty"`
	}
	abortOperationData struct {
		ID   string `json:"id"`
		OpID string `json:"opId"`
	}
	snapshotDurableData struct {
		ID         string `json:"id"`
		SnapshotID string `json:"snapshotId"`
	}
	recordUsageData struct {
		Rows []proxylink.Row `json:"rows"`
	}
)

// newCommand makes a command with an id of its own.
func newCommand(k kind, data any, now time.Time) (Command, error) {
	raw, err := json.Marshal(data)
	if err != nil {
		return Command{}, fmt.Errorf("placement: encode %s: %w", k, err)
	}
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails since Go 1.24
	return Command{V: commandVersion, ID: hex.EncodeToString(id[:]), At: now.UnixMilli(), Kind: k, Data: raw}, nil
}

// decodeCommand reads an entry of the log.
func decodeCommand(b []byte) (Command, error) {
	var c Command
	if err := json.Unmarshal(b, &c); err != nil {
		return c, fmt.Errorf("placement: not a command: %w", err)
	}
	if c.V != commandVersion {
		return c, fmt.Errorf("placement: a command of version %d: made by a newer Berth, upgrade this gateway", c.V)
	}
	if _, known := handlers[c.Kind]; !known {
		return c, fmt.Errorf("placement: unknown command %q: made by a newer Berth, upgrade this gateway", c.Kind)
	}
	return c, nil
}

// Result is the answer to a command. It is remembered with the command's id.
type Result struct {
	Session *session.Session `json:"session,omitempty"` // immutable
	Key     *Key             `json:"key,omitempty"`     // immutable
	Already bool             `json:"already,omitempty"` // the create made nothing new; the session had ended before
	Verdict bool             `json:"verdict,omitempty"` // of the operation: committed
	Refused *refusal         `json:"refused,omitempty"`
}

// refusal is an error that the log can hold.
type refusal struct {
	Code       apierr.Code `json:"code"`
	Message    string      `json:"message"`
	RetryAfter int64       `json:"retryAfterMs,omitempty"`
	StaleEpoch bool        `json:"staleEpoch,omitempty"`
	Changed    bool        `json:"changed,omitempty"` // session.ErrStale
}

// refuse turns an error of a handler into a result.
func refuse(err error) Result {
	e := apierr.From(err)
	return Result{Refused: &refusal{Code: e.Code, Message: e.Message, RetryAfter: e.RetryAfter.Milliseconds(),
		StaleEpoch: errors.Is(err, ErrStaleEpoch), Changed: errors.Is(err, session.ErrStale)}}
}

// Err is the result's refusal as an *apierr.Error, or nil.
func (r Result) Err() error {
	if r.Refused == nil {
		return nil
	}
	e := apierr.New(r.Refused.Code, "%s", r.Refused.Message)
	if r.Refused.StaleEpoch {
		e = apierr.Wrap(ErrStaleEpoch, r.Refused.Code, "%s", r.Refused.Message)
	}
	if r.Refused.Changed {
		e = apierr.Wrap(session.ErrStale, r.Refused.Code, "%s", r.Refused.Message)
	}
	return e.After(time.Duration(r.Refused.RetryAfter) * time.Millisecond)
}
