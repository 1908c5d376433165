package placement

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// ErrStaleEpoch is in the chain of the error that refuses an order of an
// earlier placement of the session (code session_not_running).
var ErrStaleEpoch = errors.New("placement: the session has moved on to a later epoch")

// CreateSession adds a RUNNING session if its project's plan allows one more:
// else concurrency_limit. With an idempotency key that this project used within
// 24 h it changes nothing and gives the session made then, existing true.
func (r *Record) CreateSession(ctx context.Context, s session.Session, idempotencyKey string) (_ session.Session, existing bool, _ error) {
	res, err := r.apply(ctx, createSession, createSessionData{s, idempotencyKey})
	return value(res.Session), res.Already, err
}

// DropSession undoes a create that nobody was told of: session and idempotency
// key are as if they had never been. A session that is unknown or has ended
// meanwhile is left alone, without error.
func (r *Record) DropSession(ctx context.Context, id string) error {
	_, err := r.apply(ctx, dropSession, dropSessionData{id})
	return err
}

// EndSession ends a session: COMPLETED with a reason, or ERROR with a sentence.
// One that has ended already stays as it was and comes back with already true.
// An epoch below the session's is refused (ErrStaleEpoch); 0 means whichever.
func (r *Record) EndSession(ctx context.Context, id string, epoch uint64, at time.Time, reason session.EndReason, errText string) (_ session.Session, already bool, _ error) {
	res, err := r.apply(ctx, endSession, endSessionData{id, epoch, at, reason, errText})
	return value(res.Session), res.Already, err
}

// PatchSession changes settings and raises SettingsVersion; session_not_running
// once it has ended. The caller has checked the bounds (accounts.CheckTimeout).
func (r *Record) PatchSession(ctx context.Context, id string, p session.Patch) (session.Session, error) {
	res, err := r.apply(ctx, patchSession, patchSessionData{id, p})
	return value(res.Session), err
}

// SetSetup notes the progress of the setup commands. For an ended session it
// changes nothing and is no error: the news may be late.
func (r *Record) SetSetup(ctx context.Context, id string, status session.SetupStatus, errText string) (session.Session, error) {
	res, err := r.apply(ctx, setSetup, setSetupData{id, status, errText})
	return value(res.Session), err
}

// RotateURLs raises URLKeyVersion, so that every older signed URL fails; with
// disconnect it raises CutBelow too, so that sockets they opened have to close.
func (r *Record) RotateURLs(ctx context.Context, id string, disconnect bool) (session.Session, error) {
	res, err := r.apply(ctx, rotateURLs, rotateURLsData{id, disconnect})
	return value(res.Session), err
}

// RotateProxy makes every proxy of a session take a new address. Errors:
// invalid_request without a proxy, session_not_running once it has ended.
func (r *Record) RotateProxy(ctx context.Context, id string) (session.Session, error) {
	res, err := r.apply(ctx, rotateProxy, rotateProxyData{id})
	return value(res.Session), err
}

// PutKey adds an API key, and its project if that is new (then Plan is
// required); a plan or name that is given replaces the project's. A key whose hash
// the project has already comes back as it is. Empty ID and zero CreatedAt are
// filled in.
func (r *Record) PutKey(ctx context.Context, p Project, k Key) (Key, error) {
	if k.ID == "" {
		var id [8]byte
		_, _ = rand.Read(id[:]) // never fails since Go 1.24
		k.ID = "key_" + hex.EncodeToString(id[:])
	}
	if k.CreatedAt.IsZero() {
		k.CreatedAt = time.Now()
	}
	k.ProjectID, k.CreatedAt = p.ID, k.CreatedAt.UTC().Truncate(time.Millisecond)
	res, err := r.apply(ctx, putKey, putKeyData{p, k})
	return value(res.Key), err
}

// RevokeKey makes a key fail from now on, for good. Again is no error.
func (r *Record) RevokeKey(ctx context.Context, id string) (Key, error) {
	res, err := r.apply(ctx, revokeKey, revokeKeyData{id})
	return value(res.Key), err
}

// SetPlans adds plans and replaces those of the same name. Others stay.
func (r *Record) SetPlans(ctx context.Context, plans []Plan) error {
	_, err := r.apply(ctx, setPlans, setPlansData{plans})
	return err
}

// apply runs one command through the log and gives apply's answer. It is the
// one way into the log; forwarding to a leader elsewhere joins here.
//
// Once proposed it waits for the verdict whatever ctx says: a caller that
// left would not know whether a session exists. Raft bounds that wait: a leader
// without quorum steps down.
func (r *Record) apply(ctx context.Context, k kind, data any) (Result, error) {
	c, err := newCommand(k, data, time.Now())
	if err != nil {
		return Result{}, err
	}
	entry, err := json.Marshal(c)
	if err != nil {
		return Result{}, fmt.Errorf("placement: encode %s: %w", k, err)
	}
	for {
		if err := ctx.Err(); err != nil {
			return Result{}, fmt.Errorf("placement: %s: %w", k, context.Cause(ctx))
		}
		if !r.Leader() {
			return Result{}, noLeader(nil)
		}
		future := r.raft.Apply(entry, enqueueTimeout)
		err := future.Error()
		switch {
		case err == nil:
			res := future.Response().(Result)
			return res, res.Err()
		case errors.Is(err, raft.ErrLeadershipLost):
			// It may be in the log or not. The same id again cannot do it twice.
			if err := r.waitBriefly(ctx); err != nil {
				return Result{}, err
			}
		default:
			return Result{}, noLeader(err)
		}
	}
}

const (
	enqueueTimeout = 5 * time.Second
	leaderPatience = 3 * time.Second
)

// waitBriefly waits for leadership to come back, as it does after a stutter.
func (r *Record) waitBriefly(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaderPatience)
	defer cancel()
	if err := r.WaitLeader(ctx); err != nil {
		return noLeader(err)
	}
	return nil
}

func noLeader(cause error) error {
	return apierr.Wrap(cause, apierr.Unavailable, "the cluster's record takes no changes at the moment: try again shortly").After(time.Second)
}

func value[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
