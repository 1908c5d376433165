package placement

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/hashicorp/go-memdb"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// What apply remembers, and how long, by command time.
const (
	idempotencyAge = 24 * time.Hour
	answerAge      = 10 * time.Minute
	answersKept    = 10_000  // so many are kept whatever their age
	answersMax     = 100_000 // and never more than these
	pruneStep      = 64      // rows at most that one command clears away

	concurrencyRetry = 5 * time.Second
)

// change is one command under way: a write transaction and the next head.
type change struct {
	txn  *memdb.Txn
	head head
	cmd  Command
}

// handlers decide and write. An error refuses the command; a handler returns
// it before its first write.
var handlers map[kind]func(*change) (Result, error)

func init() { // a literal would be an initialisation cycle through decodeCommand
	handlers = map[kind]func(*change) (Result, error){
		initCluster:   with((*change).initCluster),
		createSession: with((*change).createSession),
		dropSession:   with((*change).dropSession),
		endSession:    with((*change).endSession),
		patchSession:  with((*change).patchSession),
		setSetup:      with((*change).setSetup),
		rotateURLs:    with((*change).rotateURLs),
		rotateProxy:   with((*change).rotateProxy),
		putKey:        with((*change).putKey),
		revokeKey:     with((*change).revokeKey),
		setPlans:      with((*change).setPlans),

		machineEnded:    with((*change).machineEnded),
		openOperation:   with((*change).openOperation),
		commitOperation: with((*change).commitOperation),
		abortOperation:  with((*change).abortOperation),
		snapshotDurable: with((*change).snapshotDurable),

		recordUsage: with((*change).recordUsage),
	}
}

// with decodes a handler's payload.
func with[T any](f func(*change, T) (Result, error)) func(*change) (Result, error) {
	return func(c *change) (Result, error) {
		var data T
		if err := json.Unmarshal(c.cmd.Data, &data); err != nil {
			return Result{}, apierr.Wrap(err, apierr.Internal, "command %s cannot be read", c.cmd.Kind)
		}
		return f(c, data)
	}
}

// Apply runs a command. It depends on nothing but the state and the command:
// no clock, no randomness, no order of maps. A command whose id is remembered
// gets the remembered answer and changes nothing.
func (s *State) Apply(index uint64, cmd Command) Result {
	txn := s.db.Txn(true)
	defer txn.Commit()
	c := &change{txn: txn, cmd: cmd, head: *first[head](txn, tabHead, byID, headKey)}
	defer func() { must(txn.Insert(tabHead, &c.head)) }()
	c.head.Index = index
	c.head.Clock = max(c.head.Clock, cmd.At)

	if known := first[answer](txn, tabAnswers, byID, []byte(cmd.ID)); known != nil {
		return known.Result
	}
	res, err := handlers[cmd.Kind](c)
	if err != nil {
		res = refuse(err)
	}
	c.remember(res)
	return res
}

func (c *change) initCluster(d initClusterData) (Result, error) {
	if len(c.head.SigningKey) == 0 { // the first to come decides
		c.head.SigningKey = d.SigningKey
	}
	return Result{}, nil
}

func (c *change) createSession(d createSessionData) (Result, error) {
	c.forgetIdempotency()
	s := &d.Session
	if known := idempotent(c.txn, c.head.Clock, s.ProjectID, d.IdempotencyKey); known != nil {
		return Result{Session: known, Already: true}, nil
	}
	if s.ID == "" || s.Status != session.Running || strings.ContainsRune(d.IdempotencyKey, 0) {
		return Result{}, apierr.New(apierr.Internal, "a session is created RUNNING, with an id")
	}
	if first[session.Session](c.txn, tabSessions, byID, []byte(s.ID)) != nil {
		return Result{}, apierr.New(apierr.Internal, "session %s exists already", s.ID)
	}
	if err := c.roomForOne(s.ProjectID); err != nil {
		return Result{}, err
	}
	if len(s.UserMetadata) == 0 || string(s.UserMetadata) == "null" {
		s.UserMetadata = json.RawMessage("{}")
	}
	s.URLIndex = c.head.Index
	c.put(tabSessions, s)
	if d.IdempotencyKey != "" {
		c.put(tabIdem, &idemKey{s.ProjectID, d.IdempotencyKey, s.ID, c.head.Clock})
	}
	return Result{Session: s}, nil
}

// idempotent gives the session that the project made with the key, or nil; clock
// is the record's.
func idempotent(txn *memdb.Txn, clock int64, project, key string) *session.Session {
	if key == "" {
		return nil
	}
	known := first[idemKey](txn, tabIdem, byID, words(project, key))
	if known == nil || clock-known.At >= idempotencyAge.Milliseconds() {
		return nil
	}
	return first[session.Session](txn, tabSessions, byID, []byte(known.SessionID))
}

// roomForOne checks the plan's limit against the sessions themselves.
func (c *change) roomForOne(projectID string) error {
	project := first[Project](c.txn, tabProjects, byID, []byte(projectID))
	if project == nil {
		return apierr.New(apierr.NotFound, "there is no project %q", projectID)
	}
	plan := first[Plan](c.txn, tabPlans, byID, []byte(project.Plan))
	if plan == nil {
		return apierr.New(apierr.Internal, "project %s has the plan %q, which is not there", projectID, project.Plan)
	}
	if n := counted(c.txn, projectID); n >= plan.ConcurrentSessions {
		return apierr.New(apierr.ConcurrencyLimit, "the plan %s allows %d running sessions at once and %d are running: release one first",
			plan.Name, plan.ConcurrentSessions, n).After(concurrencyRetry)
	}
	return nil
}

func (c *change) dropSession(d dropSessionData) (Result, error) {
	s := first[session.Session](c.txn, tabSessions, byID, []byte(d.ID))
	if s == nil || s.Status.Ended() {
		return Result{Already: true}, nil
	}
	must(c.txn.Delete(tabSessions, s))
	if k := first[idemKey](c.txn, tabIdem, bySession, []byte(d.ID)); k != nil {
		must(c.txn.Delete(tabIdem, k))
	}
	return Result{}, nil
}

func (c *change) endSession(d endSessionData) (Result, error) {
	s, err := c.session(d.ID)
	if err != nil {
		return Result{}, err
	}
	if s.Status.Ended() {
		return Result{Session: s, Already: true}, nil
	}
	if d.Epoch != 0 && d.Epoch < s.Epoch {
		return Result{}, apierr.Wrap(ErrStaleEpoch, apierr.SessionNotRunning, "epoch %d of session %s is over: it is at %d", d.Epoch, s.ID, s.Epoch)
	}
	if d.Reason == session.PausedExpired && (s.Status != session.Paused || s.Op != nil) {
		return Result{Session: s, Already: true}, nil // a resume was quicker
	}
	return c.update(session.End(*s, d.At, d.Reason, d.Error))
}

func (c *change) patchSession(d patchSessionData) (Result, error) {
	s, err := c.session(d.ID)
	if err != nil {
		return Result{}, err
	}
	return c.update(d.Patch.Apply(*s))
}

func (c *change) setSetup(d setSetupData) (Result, error) {
	s, err := c.session(d.ID)
	if err != nil {
		return Result{}, err
	}
	if s.Status.Ended() {
		return Result{Session: s, Already: true}, nil
	}
	next := *s
	next.SetupStatus, next.SetupError = d.Status, d.Error
	return c.update(next, nil)
}

func (c *change) rotateURLs(d rotateURLsData) (Result, error) {
	s, err := c.session(d.ID)
	if err != nil {
		return Result{}, err
	}
	next, err := session.RotateURLs(*s, d.Disconnect)
	next.URLIndex = c.head.Index
	return c.update(next, err)
}

func (c *change) rotateProxy(d rotateProxyData) (Result, error) {
	s, err := c.session(d.ID)
	if err != nil {
		return Result{}, err
	}
	return c.update(session.RotateProxy(*s))
}

func (c *change) session(id string) (*session.Session, error) {
	if s := first[session.Session](c.txn, tabSessions, byID, []byte(id)); s != nil {
		return s, nil
	}
	return nil, apierr.New(apierr.NotFound, "there is no session %q", id)
}

// update takes what a rule of shared/session returned.
func (c *change) update(s session.Session, err error) (Result, error) {
	if err != nil {
		return Result{}, fmt.Errorf("update: %w", err)
	}
	c.put(tabSessions, &s)
	return Result{Session: &s}, nil
}

func (c *change) put(table string, row any) { must(c.txn.Insert(table, row)) }
