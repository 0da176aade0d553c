use super::*;
use crate::flight_recorder::Activity;
use crate::store::frame::FrameBuffer;
use crate::store::protocol::PresenceStatus;
use proptest::prelude::*;
use serde_bytes::ByteBuf;
use std::time::Duration;

/// What each connection was sent, and whether it was closed.
#[derive(Default)]
struct Sent {
    events: HashMap<ConnectionId, Vec<Event>>,
    closed: Vec<ConnectionId>,
}

struct Store {
    state: State,
    sent: Sent,
}

fn store(world_size: usize, host: Option<usize>) -> Store {
    Store {
        state: State::new(world_size, host),
        sent: Sent::default(),
    }
}

fn hello(rank: usize, world_size: usize) -> Hello {
    Hello {
        version: VERSION,
        rank,
        world_size,
        pid: 100 + rank as u32,
        host: "node1".to_owned(),
        silence_ms: 30_000,
    }
}

impl Store {
    fn collect(&mut self) {
        for output in self.state.take_outputs() {
            match output {
                Output::Close(id) => self.sent.closed.push(id),
                Output::Send(id, frame) => {
                    let mut buffer = FrameBuffer::default();
                    buffer.extend(&frame);
                    let message = buffer.next(usize::MAX).unwrap().unwrap();
                    let event = rmp_serde::from_slice(message).unwrap();
                    self.sent.events.entry(id).or_default().push(event);
                }
            }
        }
    }

    fn greet(&mut self, id: ConnectionId, hello: &Hello) {
        let hello = rmp_serde::to_vec(hello).unwrap();
        self.state.join(id, &hello, Instant::now());
        self.collect();
    }

    /// Ranks 0, 1, ... on connections 0, 1, ...
    fn with_all(mut self) -> Self {
        let n = self.state.world_size;
        for rank in 0..n {
            self.greet(rank as u64, &hello(rank, n));
        }
        self.sent = Sent::default();
        self
    }

    fn ask(&mut self, id: ConnectionId, request: &Request) {
        let message = rmp_serde::to_vec(request).unwrap();
        self.state.receive(id, &message, Instant::now()).unwrap();
        self.collect();
    }

    fn lose(&mut self, id: ConnectionId) {
        self.state.lose(id, "ended", Instant::now());
        self.collect();
    }

    fn events(&self, id: ConnectionId) -> &[Event] {
        self.sent.events.get(&id).map_or(&[], |events| events)
    }

    /// Why connection `id` was refused.
    fn refusal(&self, id: ConnectionId) -> &str {
        assert!(self.sent.closed.contains(&id));
        match self.events(id) {
            [Event::Refused { message }] => message,
            events => panic!("it was not refused but sent {events:?}"),
        }
    }
}

fn value(text: &str) -> ByteBuf {
    ByteBuf::from(text)
}

fn answer(id: u64, answer: Answer) -> Event {
    Event::Answer { id, answer }
}

#[test]
fn a_second_rank_of_one_number_is_refused_and_the_first_is_not_disturbed() {
    let mut store = store(2, None).with_all();
    let second = Hello {
        pid: 7,
        host: "node2".to_owned(),
        ..hello(1, 2)
    };
    store.greet(9, &second);
    let refusal = store.refusal(9);
    assert!(
        refusal.contains("process 101 on node1 has it, and process 7 on node2 came second"),
        "{refusal}"
    );
    store.lose(9);
    assert_eq!(store.events(0), []);
    assert_eq!(store.events(1), []);
    assert!(store.state.first_failure().is_none());
}

#[test]
fn ranks_that_do_not_fit_are_refused() {
    let mut store = store(2, Some(0));
    store.greet(0, &hello(1, 4));
    assert!(store.refusal(0).contains(
        "rank 1 (process 101 on node1) was started with a world size of 4 and rank 0, which hosts \
         the store, with 2"
    ));
    store.greet(1, &hello(2, 2));
    assert!(store.refusal(1).contains("not in 0..2"));
    let future = Hello {
        version: VERSION + 1,
        ..hello(1, 2)
    };
    store.greet(2, &future);
    assert!(
        store
            .refusal(2)
            .contains("build all ranks from the same version")
    );
    store.state.join(3, b"\xc1 no hello", Instant::now());
    store.collect();
    assert!(store.refusal(3).contains("version"));
    assert!(!store.state.has_members());
}

#[test]
fn a_death_is_told_to_everyone_and_to_those_who_come_later() {
    let mut store = store(3, None);
    store.greet(0, &hello(0, 3));
    store.greet(1, &hello(1, 3));
    store.lose(1);
    let failed = Event::Failed {
        rank: 1,
        message: "rank 1 died: process 101 on node1 ended".to_owned(),
    };
    assert_eq!(store.events(0).last(), Some(&failed));
    store.greet(2, &hello(2, 3));
    assert_eq!(store.events(2), [Event::Welcome { host: None }, failed]);
    assert_eq!(store.state.first_failure().unwrap().rank, 1);
    store.greet(4, &hello(1, 3));
    assert!(store.refusal(4).contains("came too late to be rank 1"));
}

#[test]
fn last_words_are_the_cause_of_a_death_that_follows() {
    let mut store = store(2, None).with_all();
    let text = "panicked at src/main.rs:12:5: boom".to_owned();
    store.ask(1, &Request::LastWords { id: 5, text });
    assert_eq!(store.events(1), [answer(5, Answer::Done)]);
    store.lose(1);
    let message = "rank 1 panicked at src/main.rs:12:5: boom";
    assert!(store.events(0).contains(&Event::Failed {
        rank: 1,
        message: message.to_owned()
    }));
    assert_eq!(store.state.first_failure().unwrap().message, message);
}

#[test]
fn last_words_long_ago_are_mentioned_only() {
    let now = Instant::now();
    let mut member = Member::new(&hello(1, 2), now);
    member.say("panicked at a.rs:1:1: boom".to_owned(), now);
    assert_eq!(
        member.epitaph(1, "was killed", now + Duration::from_secs(60)),
        "rank 1 died: process 101 on node1 was killed; 60 s before, it panicked at a.rs:1:1: boom"
    );
}

#[test]
fn a_farewell_is_no_failure() {
    let mut store = store(2, None).with_all();
    let text = "panicked, and it was caught".to_owned();
    store.ask(1, &Request::LastWords { id: 1, text });
    store.ask(1, &Request::Farewell);
    store.lose(1);
    assert_eq!(store.events(0).last(), Some(&Event::Left { rank: 1 }));
    assert_eq!(store.sent.closed, [1]);
    assert!(store.state.first_failure().is_none());
}

#[test]
fn values_are_waited_for() {
    let mut store = store(2, None).with_all();
    let key = || "k".to_owned();
    store.ask(1, &Request::Get { id: 1, key: key() });
    store.ask(1, &Request::Get { id: 2, key: key() });
    store.ask(1, &Request::Cancel { id: 1 });
    assert_eq!(store.events(1), []);
    let (key, value) = (key(), value("v"));
    store.ask(
        0,
        &Request::Set {
            id: 1,
            key: key.clone(),
            value: value.clone(),
        },
    );
    assert_eq!(store.events(0), [answer(1, Answer::Done)]);
    assert_eq!(store.events(1), [answer(2, Answer::Value(value.clone()))]);
    store.ask(0, &Request::Get { id: 3, key });
    assert_eq!(store.events(0)[1], answer(3, Answer::Value(value)));
}

#[test]
fn counters_count() {
    let mut store = store(2, None).with_all();
    for (id, amount) in [(1, 5), (2, -7), (3, i64::MIN)] {
        let key = "n".to_owned();
        store.ask(0, &Request::Add { id, key, amount });
    }
    let sums = [5, -2, (-2_i64).wrapping_add(i64::MIN)];
    let answers: Vec<Event> = (1..4)
        .zip(sums)
        .map(|(id, sum)| answer(id, Answer::Sum(sum)))
        .collect();
    assert_eq!(store.events(0), answers);
}

fn gather(id: u64, text: &str) -> Request {
    Request::Gather {
        id,
        key: "all".to_owned(),
        value: value(text),
    }
}

#[test]
fn values_are_gathered_in_rank_order_again_and_again() {
    let mut store = store(3, None).with_all();
    for round in 0..2 {
        for rank in [2, 0, 1] {
            store.ask(rank, &gather(round, &format!("{rank}")));
        }
        let values = Answer::Values(vec![value("0"), value("1"), value("2")]);
        for rank in 0..3 {
            assert_eq!(
                store.events(rank).last(),
                Some(&answer(round, values.clone()))
            );
        }
    }
    store.ask(1, &gather(5, "1"));
    store.ask(1, &gather(6, "1"));
    let Some(Event::Answer {
        id: 6,
        answer: Answer::Invalid(why),
    }) = store.events(1).last()
    else {
        panic!("it may not take part twice");
    };
    assert!(why.contains("already"));
}

#[test]
fn who_gathers_with_a_rank_that_left_is_told() {
    let mut store = store(3, None).with_all();
    store.ask(0, &gather(1, "0"));
    store.ask(2, &Request::Farewell);
    assert!(
        store
            .events(0)
            .contains(&answer(1, Answer::Departed(vec![2])))
    );
    store.ask(1, &gather(1, "1"));
    assert!(
        store
            .events(1)
            .contains(&answer(1, Answer::Departed(vec![2])))
    );
}

#[test]
fn when_one_gives_up_everyone_is_told_the_same() {
    let mut store = store(4, None);
    for rank in 0..3 {
        store.greet(rank, &hello(rank as usize, 4));
    }
    store.ask(0, &gather(1, "0"));
    store.ask(1, &gather(2, "1"));
    store.ask(0, &Request::GiveUp { id: 9 });
    store.ask(0, &Request::GiveUp { id: 1 });
    let told = |store: &Store, rank, id| match store.events(rank).last() {
        Some(Event::Answer {
            id: answered,
            answer: Answer::Members(members),
        }) if *answered == id => members.clone(),
        event => panic!("rank {rank} was told {event:?}"),
    };
    let members = told(&store, 0, 1);
    assert_eq!(members, told(&store, 1, 2));
    let gathered: Vec<bool> = members.iter().map(|member| member.gathered).collect();
    assert_eq!(gathered, [true, true, false, false]);
    assert!(matches!(
        members[2].presence,
        PresenceStatus::Present { .. }
    ));
    assert_eq!(members[3].presence, PresenceStatus::Absent);
    assert_eq!(store.events(2), [Event::Welcome { host: None }]);
    // The second to give up is on time for the answer that is on its way.
    store.ask(1, &Request::GiveUp { id: 2 });
    assert_eq!(told(&store, 1, 2), members);
}

#[test]
fn what_is_too_large_is_refused() {
    let mut store = store(1, None).with_all();
    let key = "k".repeat(500);
    store.ask(
        0,
        &Request::Add {
            id: 1,
            key,
            amount: 1,
        },
    );
    store.ask(0, &gather(2, &"v".repeat(70_000)));
    for event in store.events(0) {
        assert!(matches!(
            event,
            Event::Answer {
                answer: Answer::Invalid(_),
                ..
            }
        ));
    }
    assert_eq!(store.events(0).len(), 2);
}

#[test]
fn a_poisoned_group_is_told_with_the_cause() {
    let mut store = store(3, None).with_all();
    let error = ErrorMessage::new(&crate::Error::peer([1], "no data from rank 1"));
    let poison = Request::Poison {
        error: error.clone(),
    };
    store.ask(2, &poison);
    assert_eq!(
        store.events(0),
        [Event::Poisoned {
            rank: 2,
            error: error.clone()
        }]
    );
    assert_eq!(store.events(1), [Event::Poisoned { rank: 2, error }]);
    assert_eq!(store.events(2), []);
    let failure = store.state.first_failure().unwrap();
    assert_eq!(
        (failure.rank, &failure.message[..]),
        (1, "no data from rank 1")
    );
}

#[test]
fn a_rank_can_come_back_after_it_left() {
    let mut store = store(2, None).with_all();
    store.ask(0, &Request::Farewell);
    store.greet(10, &hello(0, 2));
    assert_eq!(store.events(10), [Event::Welcome { host: None }]);
    // Rank 1 is still in the first group, and is not disturbed.
    store.ask(10, &gather(1, "0"));
    store.ask(1, &Request::Farewell);
    store.greet(11, &hello(1, 2));
    store.ask(11, &gather(1, "1"));
    let values = Answer::Values(vec![value("0"), value("1")]);
    assert!(store.events(10).contains(&answer(1, values.clone())));
    assert!(store.events(11).contains(&answer(1, values)));
    assert_eq!(store.state.groups.len(), 1, "the first group is forgotten");
}

#[test]
fn goodbye_is_said_to_all() {
    let mut store = store(2, Some(0)).with_all();
    store.state.say_goodbye();
    store.collect();
    assert_eq!(store.events(1), [Event::Goodbye]);
    assert_eq!(store.sent.closed, [0, 1]);
    store.lose(1);
    assert!(store.state.first_failure().is_none());
}

#[test]
fn a_damaged_message_ends_the_connection() {
    let mut store = store(1, None).with_all();
    assert!(store.state.receive(0, b"\xc1\xc1", Instant::now()).is_err());
}

fn requests() -> impl Strategy<Value = Request> {
    let key = "[ab]".boxed();
    let id = 0..6_u64;
    prop_oneof![
        (id.clone(), key.clone()).prop_map(|(id, key)| Request::Set {
            id,
            key,
            value: value("v")
        }),
        (id.clone(), key.clone()).prop_map(|(id, key)| Request::Get { id, key }),
        (id.clone(), key.clone(), any::<i64>()).prop_map(|(id, key, amount)| Request::Add {
            id,
            key,
            amount
        }),
        (id.clone(), key.clone()).prop_map(|(id, key)| Request::Gather {
            id,
            key,
            value: value("w")
        }),
        id.clone().prop_map(|id| Request::Cancel { id }),
        id.clone().prop_map(|id| Request::GiveUp { id }),
        id.prop_map(|id| Request::LastWords {
            id,
            text: "t".to_owned()
        }),
        any::<String>().prop_map(|text| {
            let activity = Activity { text, wait: None };
            Request::Heartbeat { activity }
        }),
        Just(Request::Farewell),
        proptest::collection::vec(any::<usize>(), 0..2).prop_map(|ranks| Request::Poison {
            error: ErrorMessage::new(&crate::Error::peer(ranks, "p"))
        }),
    ]
}

proptest! {
    /// Whatever ranks do, in whatever order, the store stands, answers no more
    /// often than it was asked, and forgets what nobody needs.
    #[test]
    fn any_requests_are_survived(
        steps in proptest::collection::vec(
            (0..4_usize, prop_oneof![
                6 => requests().prop_map(Some),
                1 => Just(None),
            ]),
            0..60,
        ),
    ) {
        let mut store = store(3, None).with_all();
        let mut connections: Vec<ConnectionId> = vec![0, 1, 2];
        let mut next: ConnectionId = 3;
        let mut asked = 0;
        for (rank, step) in steps {
            match (step, connections.get(rank)) {
                (Some(request), Some(&id)) => {
                    asked += 1;
                    store.ask(id, &request);
                }
                (None, Some(&id)) => store.lose(id),
                // A rank comes, or comes back.
                (_, None) => {
                    for (rank, connection) in connections.iter_mut().enumerate() {
                        store.greet(next, &hello(rank, 3));
                        if matches!(store.events(next).first(), Some(Event::Welcome { .. })) {
                            *connection = next;
                        }
                        next += 1;
                    }
                }
            }
        }
        let events = store.sent.events.values().flatten();
        let answers = events.filter(|event| matches!(event, Event::Answer { .. })).count();
        prop_assert!(answers <= asked);
        for id in 0..next {
            store.lose(id);
        }
        prop_assert!(!store.state.has_members());
        prop_assert_eq!(store.state.groups.len(), 1);
    }
}
